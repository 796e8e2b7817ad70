package row

import "strings"

var kindNames = map[Kind]string{
	Text: "text", Bool: "bool", Int: "int", Float: "float", Time: "time", Bytes: "bytes", ObjectID: "objectid", Decimal: "decimal", JSON: "json",
}

// Layout tells the fields of row type R in words, "" where it has faults.
func Layout[R any]() string {
	s, err := Of[R]()
	if err != nil {
		return ""
	}
	var fields []string
	for _, f := range s.Fields {
		text := f.Name + " " + kindNames[f.Kind]
		switch f.Role {
		case Key:
			text += " key"
		case Sum:
			text += " sum"
		}
		if f.Nullable {
			text += " null"
		}
		fields = append(fields, text)
	}
	return strings.Join(fields, ", ")
}
