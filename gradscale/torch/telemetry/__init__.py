"""What became of steps, on its way from the device to the host and to whoever asks."""
