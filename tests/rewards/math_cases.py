r"""Responses, known answers, what is right: the cases of CASES.md, then more of each one's kind."""

CASES = [
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac{3}{4}}", "0.75", 1),
    (r"\boxed{\frac{1}{1+\sqrt{2}}}", r"\sqrt{2}-1", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{5\,\mathrm{m/s}}", "5", 1),
    (r"\boxed{3\times 10^{8}}", "300000000", 1),
    (r"\boxed {42}", "42", 1),
    (r"\boxed{0.333}", "1/3", 0),
    (r"First \boxed{7}, no: \boxed{5}", "7", 0),
    (r"first \boxed{7} then \boxed{5}", "7", 0),
    (r"\boxed{7}\boxed{5}", "7", 0),
    (r"\boxed{}", "42", 0),
    (r"\boxed{42", "42", 0),
]

FRACTIONS_AND_ROOTS = [
    (r"\boxed{\frac12}", "0.5", 1),
    (r"\boxed{3/4}", r"\frac34", 1),
    (r"\boxed{1\frac{1}{2}}", "1.5", 1),
    (r"\boxed{-\tfrac{1}{2}}", "-0.5", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{2.828}", r"2\sqrt{2}", 0),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", 1),
    (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}", 1),
    (r"\boxed{0.\overline{3}}", r"0.3", 0),
]

NUMBERS = [
    (r"\boxed{1\,234}", "1234", 1),
    (r"\boxed{1\;000\;000}", "1000000", 1),
    (r"\boxed{1,234,567}", "1234567", 1),
    (r"\boxed{10000}", "10{,}000", 1),
    (r"\boxed{10{,}000}", r"10,\!000", 1),
    (r"\boxed{\$1{,}234.50}", "1234.5", 1),
    (r"\boxed{1.5\cdot 10^{3}}", "1500", 1),
    (r"\boxed{1.5e3}", "1500", 1),
    (r"\boxed{6.67\times 10^{-11}}", r"6.67\cdot 10^{-11}", 1),
    (r"\boxed{6.67\times 10^{-11}}", r"5\cdot 10^{-11}", 0),
    (r"\boxed{0.0000001}", "0.0000002", 0),
    (r"\boxed{2\times 10^{-7}}", r"\frac{1}{10^{7}}", 0),
    (r"\boxed{0}", r"10^{-9}", 0),
    (r"\boxed{2^{100}}", "1267650600228229401496703205376", 1),
    (r"\boxed{2^{100}+1}", "1267650600228229401496703205376", 0),
    (r"\boxed{42.}", "42", 1),
    (r"\boxed{007}", "7", 1),
    (r"\boxed{7}", "7.0", 1),
    (r"\boxed{12}", "21", 0),
    (r"\boxed{\frac{1}{0}}", "5", 0),
    (r"\boxed{\frac{0}{0}}", "5", 0),
]

SETS_TUPLES_INTERVALS = [
    (r"\boxed{1, 2, 3}", r"\{3,2,1\}", 1),
    (r"\boxed{5,7}", "5", 0),
    (r"\boxed{2\text{ and }3}", "2,3", 1),
    (r"\boxed{2} and \boxed{3}", "2,3", 1),
    (r"\boxed{2}, \boxed{3}", "3", 0),
    (r"\boxed{\pm 2}", "2,-2", 1),
    (r"\boxed{[1,2)}", "[1,2)", 1),
    (r"\boxed{[1,2]}", "[1,2)", 0),
    (r"\boxed{1\le x\le 2}", "[1,2]", 1),
    (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(3,\infty)\cup(-\infty,2)", 1),
    (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"( 3, \frac{\pi}{2} )", 1),
    (
        r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        1,
    ),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
]

UNITS_AND_WORDS = [
    (r"\boxed{12\text{ cm}^2}", "12", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{12.5\%}", "12.5", 1),
    (r"\boxed{12.5\%}", "0.125", 1),
    (r"\boxed{12.5\%}", r"12.5\%", 1),
    (r"\boxed{\text{(A)}}", "A", 1),
    (r"\boxed{\mathbf{A}}", "A", 1),
    (r"\boxed{\text{Tuesday}}", "Monday", 0),
    (r"\boxed{x}", "y", 0),
]

FORMULAS = [
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{y=2x+3}", "y=2x+1", 0),
    (r"\boxed{\binom{5}{2}}", "10", 1),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{\sin^2x+\cos^2x}", "1", 1),
    (r"\boxed{i+1}", "1+i", 1),
]

WHERE_THE_ANSWER_IS = [
    (r"so $\boxed{\frac{3}{4}}$.", "3/4", 1),
    (r"\fbox{3}", "3", 1),
    (r"\boxed{\boxed{3}}", "3", 1),
    (r"The final answer is $\frac{1}{2}$. I hope it is correct.", "0.5", 1),
    ("**Answer:** 42", "42", 1),
    ("#### 42", "42", 1),
    ("42", "42", 1),
    ("$x+1$", "1+x", 1),
    ("we get 42 somewhere, and then more text", "42", 0),
    (r"the answer is 42 \boxed{}", "42", 0),
    ("", "42", 0),
]

ALL = [
    *CASES,
    *FRACTIONS_AND_ROOTS,
    *NUMBERS,
    *SETS_TUPLES_INTERVALS,
    *UNITS_AND_WORDS,
    *FORMULAS,
    *WHERE_THE_ANSWER_IS,
]

ENDLESS = [
    r"9^{9^{9^9}}",
    r"10^{10^{10}}",
    "1000000000!",
    r"\sum_{k=1}^{10^9} k^{1/3}",
    r"(x+1)^{100000}",
]
"""Answers that no computer compares in any time."""

STRANGE = [
    "(" * 900 + "1" + ")" * 900,
    r"\sqrt{" * 250 + "2" + "}" * 250,
    "1" * 1999,
    r"\text{" + "a" * 1500 + "}",
    "}{",
    "\\",
    "\x00\x07\ud800",
    "$$$",
    "x" * 5000,
]
