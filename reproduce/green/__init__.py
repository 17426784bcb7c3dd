"""GREEN (NSDI'25): its evaluation, the bound that no schedule beats, the claims and their page."""
