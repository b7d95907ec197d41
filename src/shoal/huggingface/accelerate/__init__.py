"""`Accelerator`: what Hugging Face Accelerate gives a loop, on the engine of `shoal.start`."""
