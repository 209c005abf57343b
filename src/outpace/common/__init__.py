"""What any part of Outpace may use."""
