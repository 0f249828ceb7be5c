//! `TransferPlan`: which slots of the arena go where. Pure code makes it, a backend carries it out.
//!
//! Pages that lie elsewhere have plans of their own: those of heads in the host's memory are tables
//! of blocks, documents of a store come as a whole.

/// Consecutive slots of one page that go to another, over all pages of a head group's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The page where the tokens lie, and the first slot.
    pub from: (i32, u32),
    /// The page where they go, and the first slot.
    pub to: (i32, u32),
    /// Tokens.
    pub tokens: u32,
    /// New position − position at which the stored key was rotated.
    pub delta: i32,
}

impl Transfer {
    /// The row `[src_page, src_slot, dst_page, dst_slot, count, delta]` of
    /// [`CopyRerotate`](crate::ops::CopyRerotate).
    #[must_use]
    pub fn row(&self) -> [i32; 6] {
        let ((from, begin), (to, at)) = (self.from, self.to);
        [from, begin as i32, to, at as i32, self.tokens as i32, self.delta]
    }
}

/// Transfers in the order in which they were planned; none writes a slot that another one reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferPlan {
    transfers: Vec<Transfer>,
}

impl TransferPlan {
    /// A plan with room for so many transfers.
    #[must_use]
    pub fn with_capacity(transfers: usize) -> TransferPlan {
        TransferPlan { transfers: Vec::with_capacity(transfers) }
    }

    /// Plans one more.
    pub fn push(&mut self, transfer: Transfer) {
        self.transfers.push(transfer);
    }

    /// Transfers that are planned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.transfers.len()
    }

    /// Whether nothing is planned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }

    /// Gives up what would go to a page that nobody reads any more.
    pub fn give_up_into(&mut self, page: i32) {
        self.transfers.retain(|transfer| transfer.to.0 != page);
    }

    /// Takes all of them out, as rows of a copy table.
    pub fn take_rows(&mut self) -> Vec<[i32; 6]> {
        self.transfers.drain(..).map(|transfer| transfer.row()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planned_is_taken_once_as_rows() {
        let mut plan = TransferPlan::with_capacity(2);
        assert!(plan.is_empty() && plan.take_rows().is_empty());
        plan.push(Transfer { from: (7, 1), to: (9, 3), tokens: 12, delta: -4 });
        plan.push(Transfer { from: (7, 0), to: (8, 0), tokens: 1, delta: 0 });
        assert_eq!(plan.take_rows(), [[7, 1, 9, 3, 12, -4], [7, 0, 8, 0, 1, 0]]);
        assert!(plan.is_empty());
    }

    #[test]
    fn what_is_given_up_goes_to_that_page_alone() {
        let mut plan = TransferPlan::default();
        plan.push(Transfer { from: (1, 0), to: (9, 0), tokens: 4, delta: 0 });
        plan.push(Transfer { from: (9, 0), to: (2, 0), tokens: 4, delta: 0 });
        plan.give_up_into(9);
        assert_eq!(plan.take_rows(), [[9, 0, 2, 0, 4, 0]]);
    }
}
