"""Executes and launches programs: CUDA graphs, streams, ONNX Runtime, OpenVINO."""
