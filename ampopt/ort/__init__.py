"""ONNX Runtime without PyTorch: sessions, their options, and rewrites of their graphs."""
