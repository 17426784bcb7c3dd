"""Pure accounting of joules and grams: integrates power, aligns operations with it, charges owners, rolls up."""
