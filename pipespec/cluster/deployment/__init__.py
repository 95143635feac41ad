"""The plan of a cluster: checkpoints, devices, layers and memory, before any rank starts."""
