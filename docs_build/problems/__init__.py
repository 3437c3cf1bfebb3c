"""Problems with worked answers: the text of each chapter, and the calculations behind its figures."""
