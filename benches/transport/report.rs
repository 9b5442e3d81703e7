//! Medians, ratios, and how they are shown.

use serde_json::{Map, Value, json};

/// What was measured, shown at once or at the end.
pub struct Report {
    json: bool,
    all: Map<String, Value>,
}

impl Report {
    pub fn new(json: bool) -> Self {
        Self { json, all: Map::new() }
    }

    /// Two series of one unit and the ratio of their medians.
    pub fn compare(&mut self, what: &str, unit: &str, (ours, our_runs): (&str, &[f64]), (base, base_runs): (&str, &[f64]), wanted: &str) {
        let ratio = median(our_runs) / median(base_runs);
        let runs = |runs: &[f64]| runs.iter().map(|run| format!("{run:.2}")).collect::<Vec<_>>().join(" ");
        if !self.json {
            println!("{what}");
            for (name, series) in [(ours, our_runs), (base, base_runs)] {
                println!("  {name:<28} median {:6.2} {unit}   runs {}", median(series), runs(series));
            }
            println!("  ratio {ratio:.3} (wanted: {wanted})");
        }
        let series = json!({"unit": unit, ours: our_runs, base: base_runs, "ratio": ratio, "wanted": wanted});
        self.all.insert(what.to_owned(), series);
    }

    /// One series with its median and its maximum.
    pub fn series(&mut self, what: &str, unit: &str, runs: &[f64], wanted: &str) {
        let most = runs.iter().copied().fold(f64::NAN, f64::max);
        if !self.json {
            println!("{what}\n  {} runs: median {:.0} {unit}, maximum {most:.0} {unit} (wanted: {wanted})", runs.len(), median(runs));
        }
        let series = json!({"unit": unit, "runs": runs, "median": median(runs), "maximum": most, "wanted": wanted});
        self.all.insert(what.to_owned(), series);
    }

    /// A table: names of rows, and of columns with their values.
    pub fn table(&mut self, what: &str, unit: &str, rows: &[(String, Vec<(&'static str, f64)>)]) {
        if !self.json {
            println!("{what} ({unit})");
            let names = rows.first().map(|(_, columns)| columns.iter().map(|(name, _)| format!("{name:>16}")).collect::<Vec<_>>().concat());
            println!("  {:<12}{}", "", names.unwrap_or_default());
            for (row, columns) in rows {
                println!("  {row:<12}{}", columns.iter().map(|(_, value)| format!("{value:>16.1}")).collect::<Vec<_>>().concat());
            }
        }
        let columns = |columns: &[(&str, f64)]| columns.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        let table: Map<String, Value> = rows.iter().map(|(row, values)| (row.clone(), Value::Object(columns(values)))).collect();
        self.all.insert(what.to_owned(), json!({"unit": unit, "rows": table}));
    }

    pub fn finish(self) {
        if self.json {
            println!("{}", Value::Object(self.all));
        }
    }
}

pub fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), sorted.len() % 2) {
        (Some(value), 1) => *value,
        (Some(upper), _) => f64::midpoint(*upper, sorted.get(middle.wrapping_sub(1)).copied().unwrap_or(*upper)),
        (None, _) => f64::NAN,
    }
}
