//! What a scheduler has done and has before it.

/// Counts since the start, and the queue as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerMetrics {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests whose prompts are being computed.
    pub prefilling: usize,
    /// Requests that decode.
    pub decoding: usize,
    /// Namespaces that are remembered.
    pub namespaces: usize,
    /// How long the longest wait of those who wait has lasted, in nanoseconds.
    pub oldest_wait: u64,
    /// The longest wait that ended with an admission, in nanoseconds.
    pub longest_wait: u64,
    /// All waits that ended with an admission, in nanoseconds.
    pub total_wait: u64,
    /// What has been counted.
    pub counts: Counts,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Plans that computed something.
    pub steps: u64,
    /// Requests that came.
    pub arrived: u64,
    /// Admissions, those after preemptions too.
    pub admitted: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Admissions past a request that was before them and found no room.
    pub overtakes: u64,
    /// Requests that ended as they should.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Requests that were refused, on arrival or later.
    pub refused: u64,
    /// Tokens computed of prompts, again after preemptions too.
    pub prefill_tokens: u64,
    /// Tokens of admitted requests that were there already.
    pub cached_tokens: u64,
    /// Tokens decoded.
    pub decode_tokens: u64,
}
