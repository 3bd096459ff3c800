"""For teachers: the autograder, answers, a rubric, a problem set. Not in the hand-out."""
