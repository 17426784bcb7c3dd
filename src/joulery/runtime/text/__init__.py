"""Language models being served: who is next, how long it will take, what it cost."""
