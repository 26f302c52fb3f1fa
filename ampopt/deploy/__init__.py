"""Deployment: the optimized module, ONNX export and bundles."""
