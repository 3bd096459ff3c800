"""For teachers: the autograder, answers, a problem set. Not in the hand-out."""
