"""ONNX Runtime and OpenVINO without PyTorch: sessions, their options, and rewrites of their graphs."""
