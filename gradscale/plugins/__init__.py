"""Lightning, Accelerate and Transformers with our scaler inside, and loggers of its steps."""
