"""What torch.compile sees of a scaler."""
