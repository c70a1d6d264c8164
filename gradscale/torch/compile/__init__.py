"""Support for torch.compile."""
