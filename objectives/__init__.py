"""What is good: records, metrics, goals, scores and confidence. Pure; imports nothing here, so that trials stay light."""
