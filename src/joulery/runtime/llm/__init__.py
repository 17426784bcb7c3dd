"""Language models being served: waiting requests, predicted lengths, joules a request."""
