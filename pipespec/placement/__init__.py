"""Which device should hold which layers."""
