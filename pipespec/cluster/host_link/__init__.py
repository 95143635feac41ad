"""Connections to other hosts: programs run on those that SSH reaches and on those that joined."""
