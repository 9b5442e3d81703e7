//! Reads what `/metrics` says: sums of series, and quantiles of histograms between two readings.

use std::collections::BTreeMap;

/// One reading.
#[derive(Debug, Clone, Default)]
pub struct Exposition(Vec<Series>);

#[derive(Debug, Clone)]
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Exposition {
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(series).collect())
    }

    /// The sum of a name's series that `holds` wants.
    pub fn sum(&self, name: &str, holds: impl Fn(&BTreeMap<String, String>) -> bool) -> f64 {
        self.0.iter().filter(|series| series.name == name && holds(&series.labels)).map(|series| series.value).sum()
    }

    /// The sum of all series of a name.
    pub fn all(&self, name: &str) -> f64 {
        self.sum(name, |_| true)
    }

    /// Sums by a word made of the labels.
    pub fn sums(&self, name: &str, word: impl Fn(&BTreeMap<String, String>) -> String) -> Vec<(String, f64)> {
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for series in self.0.iter().filter(|series| series.name == name) {
            *sums.entry(word(&series.labels)).or_default() += series.value;
        }
        sums.into_iter().collect()
    }

    /// Quantiles of what a histogram without labels took in since `before`, by straight lines within its buckets.
    pub fn quantile(&self, before: &Self, name: &str, share: f64) -> f64 {
        let buckets = |reading: &Self| -> Vec<(f64, f64)> {
            let name = format!("{name}_bucket");
            let of_name = reading.0.iter().filter(|series| series.name == name);
            let mut buckets: Vec<(f64, f64)> =
                of_name.filter_map(|series| Some((bound(series.labels.get("le")?)?, series.value))).collect();
            buckets.sort_by(|one, two| one.0.total_cmp(&two.0));
            buckets
        };
        let earlier = buckets(before);
        let now = buckets(self);
        let new: Vec<(f64, f64)> = now
            .iter()
            .map(|(bound, count)| {
                let known = earlier.iter().find(|(other, _)| other.total_cmp(bound).is_eq());
                (*bound, count - known.map_or(0.0, |(_, count)| *count))
            })
            .collect();
        let Some((_, total)) = new.last().copied().filter(|(_, total)| *total > 0.0) else { return f64::NAN };
        let wanted = total * share;
        let mut below = (0.0, 0.0);
        for (bound, count) in new {
            if count >= wanted {
                let part = if count > below.1 { (wanted - below.1) / (count - below.1) } else { 1.0 };
                return if bound.is_finite() { below.0 + (bound - below.0) * part } else { below.0 };
            }
            below = (bound, count);
        }
        f64::NAN
    }
}

fn bound(text: &str) -> Option<f64> {
    if text == "+Inf" { Some(f64::INFINITY) } else { text.parse().ok() }
}

fn series(line: &str) -> Option<Series> {
    let (name, rest) = match line.split_once('{') {
        Some((name, rest)) => (name, Some(rest)),
        None => (line.split_once(' ')?.0, None),
    };
    let (labels, value) = match rest {
        Some(rest) => rest.rsplit_once("} ")?,
        None => ("", line.split_once(' ')?.1),
    };
    let value = value.split(' ').next()?.parse().ok()?;
    Some(Series { name: name.to_owned(), labels: pairs(labels), value })
}

/// `a="x",b="y"`; no value that is read here holds a quote.
fn pairs(text: &str) -> BTreeMap<String, String> {
    let mut parts = text.split('"');
    let mut pairs = BTreeMap::new();
    while let (Some(key), Some(value)) = (parts.next(), parts.next()) {
        pairs.insert(key.trim_start_matches(',').trim_end_matches('=').to_owned(), value.to_owned());
    }
    pairs
}
