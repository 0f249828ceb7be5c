//! Whether a text could become a document, asked before anything of it is computed.

use crate::content::ContentId;
use crate::error::Error;
use crate::ids::ScopeId;

use super::admission::{Admission, Reuse};
use super::admit::LookedUp;
use super::books::{Common, State};
use super::request::Request;
use super::{KvCache, freeze};

impl KvCache {
    /// Refuses a text for which there is no room to be admitted without reuse or, computed, to be
    /// frozen whole under a name: distinct blocks that were frozen then are those that are now,
    /// less those that only the entry of that name and those of `going` (namespace and name) hold,
    /// and those of the text that are not frozen. Only the order of eviction changes.
    ///
    /// Frozen blocks that gave way to the text may take those behind them along: whether they did
    /// is known once it is admitted, see [`Request::require_frozen_room`].
    ///
    /// # Errors
    /// As [`Self::admit`] and [`Request::freeze`].
    pub fn require_frozen_room(
        &self,
        name: &str,
        tokens: &[u32],
        (namespace, regime): (&str, u64),
        going: &[(String, String)],
    ) -> Result<(), Error> {
        let reuse = Reuse::None;
        let request = Admission { namespace, regime, reuse, ..Admission::new(tokens) };
        let marks = request.sorted_marks()?;
        let common = &self.0;
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let looked_up = LookedUp::hold(common, state, &request, &marks);
        let (needs, scope) = (&looked_up.needs, looked_up.found.scope);
        let outcome = freeze::with_room(common, state, needs, |state| {
            state.pool.require(needs)?;
            check_document(common, state, (namespace, name, scope), tokens, going)
        });
        looked_up.let_go(state);
        outcome
    }
}

impl Request {
    /// Refuses a name that this request could not be frozen under whole, once all of it was
    /// computed and committed as exact: as [`KvCache::require_frozen_room`], with what admission
    /// has found to give way.
    ///
    /// # Errors
    /// `PoolFull` or `QuotaExceeded` as [`Self::freeze`].
    pub fn require_frozen_room(&self, name: &str, going: &[(String, String)]) -> Result<(), Error> {
        let stored = self.common.store.lock();
        let named = (self.namespace.as_str(), name, self.scope);
        check_document(&self.common, &stored, named, &self.tokens, going)
    }
}

fn check_document(
    common: &Common,
    state: &State,
    (namespace, name, scope): (&str, &str, ScopeId),
    tokens: &[u32],
    going: &[(String, String)],
) -> Result<(), Error> {
    let page = common.page_tokens();
    let known = standing(state, scope, tokens, page);
    let absent = tokens.len().div_ceil(page) - known.len();
    let others = going.iter().map(|(namespace, name)| (&**namespace, &**name));
    let going: Vec<_> = std::iter::once((namespace, name)).chain(others).collect();
    freeze::check_room(common, state, &going, &known, absent)
}

/// The nodes that are there and will stand for blocks of a text when it is frozen.
fn standing(state: &State, scope: ScopeId, tokens: &[u32], page: usize) -> Vec<ContentId> {
    let chain = state.index.exact_chain(scope, tokens);
    let blocks = chain.into_iter().zip(tokens.chunks(page));
    blocks.filter_map(|(node, tokens)| state.index.stands_for(scope, tokens, node)).collect()
}
