"""What may be set: dataclasses, files of choices and the hosts file."""
