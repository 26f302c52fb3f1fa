"""Why a model is slow: what a call is made of, and findings whose remedy was executed and timed."""
