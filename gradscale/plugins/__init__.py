"""Trainers: Lightning, Accelerate and Transformers with our scaler inside."""
