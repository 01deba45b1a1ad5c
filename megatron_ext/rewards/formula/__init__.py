"""Reading mathematical answers: spelling -> tokens -> nodes -> values -> sameness."""
