"""What ran when: events, call stacks, operators."""
