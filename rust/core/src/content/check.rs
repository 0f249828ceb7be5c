//! Tables, tree, nodes and places must agree.

use crate::error::Error;

use super::ids::{ContentId, Parent};
use super::index::Index;

/// Entries that the tables should have, and those of each scope.
#[derive(Default)]
struct Entries {
    prefix: usize,
    content: usize,
    rolling: usize,
    of_scope: Vec<usize>,
}

impl Index {
    /// Checks that tables, tree, nodes and places agree.
    ///
    /// # Errors
    /// `Inconsistent` naming what does not.
    pub fn check(&self) -> Result<(), Error> {
        self.places.check()?;
        let scopes = vec![0; self.scopes.ids().count()];
        let mut entries = Entries { of_scope: scopes, ..Entries::default() };
        let mut named = 0;
        for content in self.nodes.ids() {
            let row = self.places.row(content);
            named += usize::from(row[0].is_some());
            if let Some(&block) = row.iter().find(|block| block.is_some() && !row[0].is_some()) {
                return Err(Error::inconsistent("row", "the first group's block", block.index()));
            }
            if self.nodes.is_member(content) {
                self.check_node(content, &mut entries)?;
            }
        }
        if named != self.nodes.len() {
            return Err(Error::inconsistent("contents with a block", self.nodes.len(), named));
        }
        for (scope, &least) in self.scopes.ids().zip(&entries.of_scope) {
            if self.scopes.holders(scope) < least {
                return Err(Error::inconsistent("namespace", least, self.scopes.holders(scope)));
            }
        }
        for (what, want, got) in [
            ("prefix table", entries.prefix, self.prefix.len()),
            ("virtual table", entries.content, self.content.len()),
            ("rolling table", entries.rolling, self.rolling.len()),
        ] {
            if want != got {
                return Err(Error::inconsistent(what, want, got));
            }
        }
        Ok(())
    }

    fn check_node(&self, content: ContentId, entries: &mut Entries) -> Result<(), Error> {
        let (node, tokens) = (self.nodes.get(content), self.nodes.tokens(content));
        if !self.places.row(content)[0].is_some() {
            return Err(Error::inconsistent("node", "one with a block", content.index()));
        }
        let page = self.nodes.page_tokens();
        let both = [(node.in_prefix, node.prefix_scope), (node.in_content, node.content_scope)];
        for (there, scope) in both {
            entries.of_scope[scope.0 as usize] += usize::from(there);
        }
        entries.prefix += usize::from(node.in_prefix && usize::from(node.prefix_len) == page);
        if self.is_first_alike(content) {
            entries.content += 1;
            entries.rolling += usize::from(tokens.len() == page);
            if self.find_content(node.content_scope, tokens) != Some(content) {
                let got = "another";
                return Err(Error::inconsistent("virtual index", content.index(), got));
            }
        } else if node.in_content {
            let first = self.nodes.links(content).prev_alike;
            let next = self.nodes.links(first).next_alike;
            let joined = self.nodes.get(first).in_content && next == content;
            if !joined || !self.is_content(first, node.content_scope, tokens) {
                return Err(Error::inconsistent("list of alike", content.index(), "others"));
            }
        }
        if let (true, Parent::Content(parent)) = (node.in_prefix, node.parent)
            && !self.nodes.get(parent).in_prefix
        {
            return Err(Error::inconsistent("prefix tree", "a parent", content.index()));
        }
        Ok(())
    }
}
