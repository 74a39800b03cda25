// Sorts a table by the column whose heading is clicked; a second click turns the order round.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.querySelectorAll("th")];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        // A cell without a value stays below, whatever the order.
        if (x === "" || y === "") return (x === "") - (y === "");
        const numbers = x.trim() !== "" && !isNaN(x) && !isNaN(y);
        const order = numbers ? Number(x) - Number(y) : x.localeCompare(y);
        return down ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  });
}
