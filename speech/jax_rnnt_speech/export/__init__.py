"""Models as files that other programs run: `graph` and `jaxprs` write ONNX, and `sherpa` what sherpa-onnx reads."""
