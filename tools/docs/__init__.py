"""Tools for the documentation: generated pages and figures, and the site's build."""
