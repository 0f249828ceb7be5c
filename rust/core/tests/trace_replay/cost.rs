//! How long a step takes, from what was measured.

/// Costs in nanoseconds; a step's are added up, as if nothing overlapped.
///
/// Fitted to vLLM 0.26.0 with Llama-3.1-8B shapes in bf16 on one H200 (torch.compile, CUDA graphs,
/// FlashAttention 3, random weights, chunks of 16K tokens): first token after 0.209 s for 8K
/// tokens, 1.18 s for 32K, 8.78 s for 120K; decode steps of 6.13 ms (one request of 32K), 9.64 ms
/// (16 of 8K), 19.8 ms (40 of 10K), 41.9 ms (8 of 120K). A pool there has 55.7K blocks of 16
/// tokens.
#[derive(Clone, Copy)]
pub struct StepCost {
    /// Any step: weights are read.
    pub step: f64,
    /// A token of a prompt.
    pub prompt_token: f64,
    /// A pair of a prompt's token and one that it attends to.
    pub pair: f64,
    /// A token that a decoding request attends to.
    pub read_token: f64,
}

impl StepCost {
    pub const H200_8B: StepCost =
        StepCost { step: 4.9e6, prompt_token: 22.3e3, pair: 0.8, read_token: 37.6 };
    pub const H200_8B_PAGES: usize = 55_700;

    pub fn nanos(&self, prompt_tokens: usize, pairs: usize, read_tokens: usize) -> u64 {
        let prompts = self.prompt_token * prompt_tokens as f64 + self.pair * pairs as f64;
        (self.step + prompts + self.read_token * read_tokens as f64) as u64
    }
}
