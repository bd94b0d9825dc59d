"""The network: encoders, predictor and joint, its losses, and its parameters by their paths."""
