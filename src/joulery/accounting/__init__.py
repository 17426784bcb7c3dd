"""Joules to grams to owners: integrate, align operations with power, attribute, roll up. Pure."""
