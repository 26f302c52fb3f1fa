"""Who runs a program and launches it: CUDA graphs, streams, ONNX Runtime."""
