"""From joules to grams to whom: integrate, align operations with power, attribute, roll up. Pure."""
