"""The HTTP gateway: the Open Inference Protocol on raw ASGI, in front of any engine."""
