"""Engines behind HTTP: Open Inference Protocol, OpenAI API, llama.cpp, Triton."""
