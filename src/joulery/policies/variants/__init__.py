"""Which variant runs where: Clover's objective, its searches, the policy that plans again."""
