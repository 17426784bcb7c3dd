"""Several gateways behind one controller: the processes, and what the controller knows of them."""
