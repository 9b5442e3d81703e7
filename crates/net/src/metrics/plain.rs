//! OpenMetrics text as the text format of Prometheus (0.0.4), which every scraper and `promtool check metrics` read.
//!
//! Decides how a family is named: Prometheus names a counter and an info by their series. It never changes a series or a value.

use std::collections::HashMap;

/// The same metrics in the text format of Prometheus.
pub fn plain(open_metrics: &str) -> String {
    let types: HashMap<&str, &str> = open_metrics.lines().filter_map(|line| described(line, "# TYPE ")).collect();
    let named = |name: &str| match types.get(name) {
        Some(&"counter") => format!("{name}_total"),
        Some(&"info") => format!("{name}_info"),
        _ => name.to_owned(),
    };
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines().filter(|line| *line != "# EOF" && !line.starts_with("# UNIT ")) {
        let line = if let Some((name, help)) = described(line, "# HELP ") {
            format!("# HELP {} {help}\n", named(name))
        } else if let Some((name, kind)) = described(line, "# TYPE ") {
            format!("# TYPE {} {}\n", named(name), if kind == "info" { "gauge" } else { kind })
        } else {
            format!("{line}\n")
        };
        text.push_str(&line);
    }
    text
}

/// The family and the rest of a line that describes it.
fn described<'a>(line: &'a str, keyword: &str) -> Option<(&'a str, &'a str)> {
    line.strip_prefix(keyword)?.split_once(' ')
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn families_of_counters_and_infos_are_named_by_their_series() {
        let open = "# HELP a Things.\n# TYPE a counter\na_total{b=\"# EOF\"} 1\n\
            # HELP b_seconds Time.\n# TYPE b_seconds histogram\n# UNIT b_seconds seconds\nb_seconds_sum 0.5\n\
            # HELP c Build.\n# TYPE c info\nc_info{version=\"1\"} 1\n# EOF\n";
        let expected = "# HELP a_total Things.\n# TYPE a_total counter\na_total{b=\"# EOF\"} 1\n\
            # HELP b_seconds Time.\n# TYPE b_seconds histogram\nb_seconds_sum 0.5\n\
            # HELP c_info Build.\n# TYPE c_info gauge\nc_info{version=\"1\"} 1\n";
        assert_eq!(plain(open), expected);
    }
}
