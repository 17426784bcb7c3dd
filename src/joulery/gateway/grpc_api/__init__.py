"""The Open Inference Protocol over gRPC, as used by Triton's and KServe's clients."""
