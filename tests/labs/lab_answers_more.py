"""Right and typical wrong answers of labs 0 and 6 to 9."""

from wrong_answers import Answers, Wrong

ULP = "    return torch.ldexp(torch.ones_like(weights), exponent - 9)"
MASTER = "nn.Parameter(values.chunk(num_ranks)[rank].clone())"
ADAM9 = "torch.optim.Adam([self.master], lr=lr, foreach=False)"
MEAN9 = "        self.master.grad = mean_slice(self.flat.grads.float())\n"
STEP9 = "        self.optimizer.step()\n"
SEND9 = "        gather_slices(self.flat.values, self.master.data.bfloat16())\n"
FLAG = "    bad = (~grad.isfinite().all()).float()\n"
TELL = "        dist.all_reduce(bad)\n"
SKIP = "        return None if bad else grad / self.scale"
COUNT9 = "        self.good_steps = 0 if is_skipped else self.good_steps + 1\n"
GROWN = "        elif self.good_steps == self.growth_steps:\n"
GROW = "            self.scale, self.good_steps = self.scale * 2, 0\n"
LAB9 = Answers(
    {
        '"line": None': '"line": 18',
        '"finding": None': '"finding": "SW042"',
        '"precision": None': '"precision": "masters"',
        'fp32 masters": None': 'fp32 masters": False',
        'all parameters": None': 'all parameters": False',
        'step alone": None': 'step alone": False',
    },
    [
        Wrong(1, "ulp", ULP, ULP.replace("9", "8"), "is a whole step; half of it is where"),
        Wrong(1, "ulp", ULP, ULP.replace("9", "10"), "is a quarter of a step"),
        Wrong(1, "ulp", ULP, ULP.replace("9", "12"), "is that of fp16"),
        Wrong(1, "ulp", ULP, "    return weights * 2**-8", "is the same share of each weight"),
        Wrong(
            1,
            "ulp",
            ULP,
            "    return torch.full_like(weights, 2**-8)",
            "is the same for all weights; steps grow with the exponent",
        ),
        Wrong(1, "ulp", ULP, ULP.replace("9", "25"), "is that of fp32"),
        Wrong(2, "bits", MASTER, MASTER.replace("values", "values.bfloat16().float()"), "is round"),
        Wrong(2, "held", MASTER, MASTER.replace(".clone()", ""), "a view of all fp32 values"),
        Wrong(
            2,
            "gradient",
            MASTER,
            MASTER.replace(".chunk(num_ranks)[rank]", ""),
            "of size '[34764]'",
        ),
        Wrong(2, "bits", MASTER, MASTER.replace("[rank]", "[0]"), "is one slice in every place"),
        Wrong(2, "gradient", ADAM9, "torch.optim.Adam(parameters, lr=lr)", "the gradient that"),
        Wrong(2, "held", ADAM9, "torch.optim.SGD([self.master], lr=lr)", "Adam has no moments"),
        Wrong(
            2, "gradient", MASTER, MASTER.replace("clone()", "bfloat16()"), "gradient with dtype"
        ),
        Wrong(3, "gradient", MEAN9, MEAN9[:-1] + " * 2\n", "is the sum, the mean was asked for"),
        Wrong(3, "gradient", MEAN9, MEAN9.replace(".float()", ""), "dtype"),
        Wrong(
            3,
            "gradient",
            MEAN9,
            MEAN9[:-1] + ".bfloat16().float()\n",
            "is rounded to bf16 after the sum",
        ),
        Wrong(3, "bits", STEP9 + SEND9, SEND9 + STEP9, "the bf16 values on rank"),
        Wrong(3, "bits", SEND9, "", "is as before: gather the masters after"),
        Wrong(3, "gradient", "        self.flat.grads.zero_()\n", "", "of the step before in it"),
        Wrong(3, "held", "        self.master.grad = None\n", "", "the master still has its grad"),
        Wrong(
            3,
            "sent",
            SEND9,
            "        full = torch.empty(len(self.flat.values))\n"
            "        gather_slices(full, self.master.data)\n"
            "        self.flat.values.copy_(full)\n",
            "values are sent in fp32",
        ),
        Wrong(
            3,
            "bits",
            SEND9,
            SEND9 + "        self.master.data.copy_(self.master.data.bfloat16())\n",
            "what rounding drops is not kept",
        ),
        Wrong(4, "skip", TELL, "", "only that rank sees it: tell the others"),
        Wrong(4, "skip", SKIP, SKIP.replace("/", "*"), "is multiplied by the scale"),
        Wrong(4, "skip", SKIP, SKIP.replace(" / self.scale", ""), "still has the scale in it"),
        Wrong(4, "skip", FLAG, "    bad = grad.isinf().any().float()\n", "nan in the gradient"),
        Wrong(4, "skip", FLAG, "    bad = grad.isnan().any().float()\n", "inf in the gradient"),
        Wrong(
            4,
            "skip",
            TELL,
            "        everyone = grad.clone()\n        dist.all_reduce(everyone)\n"
            "        bad = (~everyone.isfinite().all()).float()\n",
            "4,000 bytes sent, 4 are needed",
        ),
        Wrong(5, "scale", "            self.scale /= 2\n", "            pass\n", "8, 4 expected"),
        Wrong(
            5, "scale", "            self.scale /= 2\n", "            self.scale *= 2\n", "16, 4"
        ),
        Wrong(5, "scale", GROW, GROW.replace(", 0", ", self.good_steps"), "8, 16 expected"),
        Wrong(5, "scale", COUNT9, COUNT9.replace("0 if is_skipped else ", ""), "6 are counted"),
        Wrong(5, "scale", GROWN, GROWN.replace(" == self.growth_steps", " > 0"), "16, 8 expected"),
        Wrong(5, "scale", GROW, "            self.good_steps = 0\n", "4, 8 expected"),
    ],
    rough_rows=("moved", "lost", "fp16 gradients"),
)
ANSWERS = {9: LAB9}
