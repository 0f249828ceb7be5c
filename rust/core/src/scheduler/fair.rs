//! Fair shares between namespaces: deficit round robin on tokens.
//!
//! A namespace has credit in tokens. What is computed for it is taken off when it is planned, and
//! only a namespace with credit gets prompts admitted. Where none of those that wait has any, a
//! round begins: each gets its quantum times its weight. Credit is not saved up beyond one round,
//! nor by who does not wait; debt stays until rounds have paid it.

use hashbrown::HashMap;

#[derive(Default)]
struct Namespace {
    name: Box<str>,
    weight: u64,
    credit: i64,
    /// Requests of it that live.
    live: usize,
    waiting: usize,
    /// Whether the name has this number: it is anybody's otherwise.
    named: bool,
}

/// The credit of every namespace that has a live request or debt.
pub(super) struct Shares {
    quantum: u64,
    weights: HashMap<Box<str>, u64>,
    numbers: HashMap<Box<str>, u32>,
    namespaces: Vec<Namespace>,
    free: Vec<u32>,
    live: usize,
}

impl Shares {
    pub(super) fn new(quantum: u64) -> Shares {
        Shares {
            quantum,
            weights: HashMap::new(),
            numbers: HashMap::new(),
            namespaces: Vec::new(),
            free: Vec::new(),
            live: 0,
        }
    }

    /// Sets the weight of a namespace, live or to come; 1 is what every other has.
    pub(super) fn set_weight(&mut self, name: &str, weight: u64) {
        if weight == 1 {
            self.weights.remove(name);
        } else {
            self.weights.insert(name.into(), weight);
        }
        if let Some(&number) = self.numbers.get(name) {
            self.at(number).weight = weight;
        }
    }

    /// The number of a namespace, which has one more live request.
    pub(super) fn enter(&mut self, name: &str) -> u32 {
        self.live += 1;
        if let Some(&number) = self.numbers.get(name) {
            self.at(number).live += 1;
            return number;
        }
        let weight = self.weights.get(name).copied().unwrap_or(1);
        let credit = quantum_of(self.quantum, weight);
        let number = self.free.pop().unwrap_or(self.namespaces.len() as u32);
        if number as usize == self.namespaces.len() {
            self.namespaces.push(Namespace::default());
        }
        *self.at(number) =
            Namespace { name: name.into(), weight, credit, live: 1, waiting: 0, named: true };
        self.numbers.insert(name.into(), number);
        number
    }

    /// One of its requests has ended. A namespace without any is forgotten once it owes nothing,
    /// and all of them when nobody is left.
    pub(super) fn exit(&mut self, number: u32) {
        self.live -= 1;
        self.at(number).live -= 1;
        if self.live == 0 {
            self.numbers.clear();
            self.namespaces.clear();
            self.free.clear();
        } else {
            self.forget(number);
        }
    }

    pub(super) fn note_waiting(&mut self, number: u32, more: bool) {
        let waiting = &mut self.at(number).waiting;
        *waiting = if more { *waiting + 1 } else { *waiting - 1 };
    }

    /// Takes tokens off; less than nothing gives them back.
    pub(super) fn charge(&mut self, number: u32, tokens: i64) {
        let credit = &mut self.at(number).credit;
        *credit = credit.saturating_sub(tokens);
    }

    pub(super) fn has_credit(&self, number: u32) -> bool {
        self.namespaces[number as usize].credit > 0
    }

    /// As many rounds as it takes until one of these has credit.
    pub(super) fn next_rounds(&mut self, wanting: impl Iterator<Item = u32>) {
        let rounds = wanting.map(|number| {
            let namespace = &self.namespaces[number as usize];
            let quantum = quantum_of(self.quantum, namespace.weight);
            (-namespace.credit).div_euclid(quantum) + 1
        });
        let Some(rounds) = rounds.min() else { return };
        for number in 0..self.namespaces.len() as u32 {
            let namespace = &mut self.namespaces[number as usize];
            if !namespace.named {
                continue;
            }
            let quantum = quantum_of(self.quantum, namespace.weight);
            let most = if namespace.waiting > 0 { quantum } else { namespace.credit.max(0) };
            let given = quantum.saturating_mul(rounds);
            namespace.credit = namespace.credit.saturating_add(given).min(most);
            self.forget(number);
        }
    }

    fn forget(&mut self, number: u32) {
        let namespace = &mut self.namespaces[number as usize];
        if namespace.named && namespace.live == 0 && namespace.credit >= 0 {
            self.numbers.remove(&namespace.name);
            self.free.push(number);
            *namespace = Namespace::default();
        }
    }

    /// Namespaces that are remembered.
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }

    fn at(&mut self, number: u32) -> &mut Namespace {
        &mut self.namespaces[number as usize]
    }
}

fn quantum_of(quantum: u64, weight: u64) -> i64 {
    i64::try_from(quantum.saturating_mul(weight)).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}
