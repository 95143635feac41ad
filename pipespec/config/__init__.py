"""What may be set: dataclasses, Hydra and the hosts file."""
