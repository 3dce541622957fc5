"""The capacity simulation: how many requests fit, on the code that runs the engines, with no engine beneath it."""
