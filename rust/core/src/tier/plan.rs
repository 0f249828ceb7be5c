//! `TransferPlan`: which slots go where. Pure code makes it, a backend of the two places carries it
//! out.

/// A page that holds KV. Today everything is planned between pages of the device; the other kinds
/// are what plans of stores will name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// A page of the arena, by its number.
    Device(i32),
    /// A page in the host's memory.
    Host(u64),
    /// A page in a file of this machine.
    Disk(u64),
    /// A page that another machine has.
    Remote(u64),
}

/// Consecutive slots of one page that go to another, over all pages of a head group's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where the tokens lie, and the first slot.
    pub from: (Place, u32),
    /// Where they go, and the first slot.
    pub to: (Place, u32),
    /// Tokens.
    pub tokens: u32,
    /// New position − position at which the stored key was rotated.
    pub delta: i32,
}

impl Transfer {
    /// A copy inside the arena: pages and first slots of source and target.
    #[must_use]
    pub fn on_device(from: (i32, u32), to: (i32, u32), tokens: u32, delta: i32) -> Transfer {
        let place = |(page, slot)| (Place::Device(page), slot);
        Transfer { from: place(from), to: place(to), tokens, delta }
    }

    /// The row `[src_page, src_slot, dst_page, dst_slot, count, delta]` of
    /// [`CopyRerotate`](crate::ops::CopyRerotate), if both pages are the device's.
    #[must_use]
    pub fn device_row(&self) -> Option<[i32; 6]> {
        let ((Place::Device(from), begin), (Place::Device(to), at)) = (self.from, self.to) else {
            return None;
        };
        Some([from, begin as i32, to, at as i32, self.tokens as i32, self.delta])
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

    /// What is planned.
    #[must_use]
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Gives up what would go to a place that nobody reads any more.
    pub fn give_up_into(&mut self, place: Place) {
        self.transfers.retain(|transfer| transfer.to.0 != place);
    }

    /// Takes those out that stay on the device, as rows of a copy table. The others are for whoever
    /// has their places.
    pub fn take_device_rows(&mut self) -> Vec<[i32; 6]> {
        let mut rows = Vec::with_capacity(self.len());
        self.transfers.retain(|transfer| match transfer.device_row() {
            Some(row) => {
                rows.push(row);
                false
            }
            None => true,
        });
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_the_device_is_taken_as_rows_and_the_rest_stays() {
        let mut plan = TransferPlan::with_capacity(3);
        assert!(plan.is_empty() && plan.take_device_rows().is_empty());
        plan.push(Transfer::on_device((7, 1), (9, 3), 12, -4));
        let fetched =
            Transfer { from: (Place::Host(7), 0), to: (Place::Device(9), 0), tokens: 3, delta: 0 };
        plan.push(fetched);
        plan.push(Transfer::on_device((7, 0), (8, 0), 1, 0));
        assert_eq!(plan.take_device_rows(), [[7, 1, 9, 3, 12, -4], [7, 0, 8, 0, 1, 0]]);
        assert_eq!(plan.transfers(), [fetched]);
    }

    #[test]
    fn what_is_given_up_is_of_that_place_alone() {
        let mut plan = TransferPlan::default();
        plan.push(Transfer::on_device((1, 0), (9, 0), 4, 0));
        plan.push(Transfer::on_device((9, 0), (2, 0), 4, 0));
        plan.push(Transfer { to: (Place::Host(9), 0), ..plan.transfers()[0] });
        plan.give_up_into(Place::Device(9));
        assert_eq!(plan.len(), 2);
        assert_eq!(plan.take_device_rows(), [[9, 0, 2, 0, 4, 0]]);
        assert_eq!(plan.transfers()[0].to.0, Place::Host(9));
    }
}
