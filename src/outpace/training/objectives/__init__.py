"""What each method of learned drafter is trained for."""
