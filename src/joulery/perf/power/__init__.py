"""Clock, power and energy predictors."""
