"""The weights of a model, brought to the hosts whose ranks compute them."""
