"""What reads joules and watts: RAPL, NVML, a labelled CPU model, a recorded trace, a scripted fake."""
